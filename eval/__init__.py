"""From head and target to acceptance, speed and a report: python -m eval."""
