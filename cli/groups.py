"""Groups of commands: `hadagen` itself, and its commands that have subcommands."""

from __future__ import annotations

import click


class Group(click.Group):
    """Commands, listed in the order in which they were added.

    `default`: the command if none is named; "" shows the help of the group.
    """

    default = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as shells do, to complete a command
            is_of_group = bool(args) and (args[0] in ctx.help_option_names or not args[0].startswith("-"))
            if self.default and not is_of_group:
                args = [self.default, *args]
            args = args or ["--help"]
        return super().parse_args(ctx, args)
