"""Tuning: the values of a recipe that suit a data set, found by Optuna among trials from one cache."""
