"""How options that several commands have are read."""

import click


def comma_list(_ctx: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Split a comma-separated option into its non-empty parts."""
    return tuple(part.strip() for part in value.split(",") if part.strip())
