"""Tuning: the values of a recipe that suit a data set, found by Optuna among trials from one cache."""

from ...pipeline.errors import require_packages

require_packages("tuning needs", {"Optuna": "optuna"}, "tune")  # before its files import it
