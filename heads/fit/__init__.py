"""``xret fit``: from pictures and captions to the model that validation chooses, in one call."""
