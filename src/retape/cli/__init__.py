"""The `retape` command, one module per subcommand. Start from `main.main`; `terminal` has the width and character set."""

__all__ = ["demo", "fit", "main", "report", "schedule", "terminal"]
