"""The head itself: what it is trained for, and the loop that trains it."""
