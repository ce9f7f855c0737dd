"""What the best possible schedule reaches: upper bounds, exact optima of small instances, the best known."""
