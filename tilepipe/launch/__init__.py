"""From points to rows: rank processes, limits, failures."""
