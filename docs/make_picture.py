"""Write docs/summary.svg: what `stoker run recipes/digits` prints, as a picture."""

import io
from pathlib import Path

from rich.console import Console

from stoker.app.api import load
from stoker.app.chain import run_chain
from stoker.app.smoke_test import smoke_test
from stoker.cli.progress import ConsoleListener
from stoker.cli.summary import print_summary

RECIPE = Path("recipes/digits")


def main() -> None:
    """Run the recipe from the repository's root and draw its summary."""
    experiment = load(RECIPE)
    with ConsoleListener() as listener:
        result = run_chain(experiment, listener)
    proof = smoke_test(experiment, result)
    console = Console(record=True, width=110, file=io.StringIO(), highlight=False)
    print_summary(console, experiment, RECIPE, result, proof)
    console.save_svg("docs/summary.svg", title="stoker run recipes/digits")


if __name__ == "__main__":
    main()
