"""Reports for people: a plan as a table, the HTML report, the machine's state."""
