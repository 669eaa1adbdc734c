"""Stage one: plan the shards of a feature set and compute them as Dask tasks."""
