"""Stage one: encodes every sample once, a few chunks a task."""
