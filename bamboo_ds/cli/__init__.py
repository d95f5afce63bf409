"""Commands: the one room that prints."""
