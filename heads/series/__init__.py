"""Many trainings from one cache, as an ablation and a tuning have them: what is checked first, and how they run."""
