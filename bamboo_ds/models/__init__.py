"""Example layers for the main job, the benches and the tests; a user's own layers need nothing from here."""
