"""``xret recipes``: what can be trained."""

import json

import click


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.pass_context
def recipes(context: click.Context, as_json: bool) -> None:
    """List the bundled recipes.

    \b
    xret recipes
    xret recipes show setdiv
    """
    if context.invoked_subcommand is not None:
        return
    from ..heads.recipe import load_recipe, recipe_names

    known = [load_recipe(name) for name in recipe_names()]
    if as_json:
        facts = [{"name": recipe.name, "reaches": recipe.reaches, "paper": recipe.paper} for recipe in known]
        click.echo(json.dumps(facts))
        return
    width = max(len(recipe.name) for recipe in known)
    for recipe in known:
        click.echo(f"{recipe.name:{width}}  {recipe.reaches:8}  {recipe.paper}")


@recipes.command()
@click.argument("name", metavar="NAME|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved recipe as JSON.")
@click.pass_context
def show(context: click.Context, name: str, as_json: bool) -> None:
    """Show a recipe with the sources of its values; with --json, every value that it resolves to.

    \b
    xret recipes show setdiv
    """
    from ..heads.recipe import load_recipe, recipe_file

    recipe = load_recipe(name)
    if as_json or (context.parent is not None and context.parent.params["as_json"]):
        click.echo(json.dumps(recipe.to_dict()))
    else:
        click.echo(recipe_file(name).read_text(encoding="utf-8"), nl=False)
