"""Models of the Hugging Face library transformers: `hub` loads them, `images` and `texts` encode with them."""
