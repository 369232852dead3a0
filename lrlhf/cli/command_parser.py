"""Options of the commands that have no config."""

import argparse


def command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser without options yet.

    Args:
        name: Of the command.
        description: What it does, in a sentence.
        epilog: What help says below the options, line by line as it is.
    """
    return argparse.ArgumentParser(
        prog=f"lrlhf {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
