"""The `retape` command, one file a subcommand: parses, calls, prints."""
