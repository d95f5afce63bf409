"""Asks a cloud for nodes, hears its warnings, counts its money. Only `cli` knows this room; the engine never does."""
