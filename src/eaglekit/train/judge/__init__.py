"""How good a head is: simulated acceptance, and studies that compare heads."""
