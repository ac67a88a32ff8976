"""What people see of a training: progress, cards, curves, tables."""
