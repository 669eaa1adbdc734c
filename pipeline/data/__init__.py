"""What is to be encoded: the manifest, its captions in the order of the store, its pictures, and generated scenes."""
