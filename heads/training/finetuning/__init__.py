"""Fine-tuning: the backbones of a trained head are put back, and all is trained end to end."""
