"""The demo: every room of the house once, in the order of the work, on slides made up for it."""
