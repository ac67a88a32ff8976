"""What a head is trained on: rows of files, the target's answers, its own dialogues."""
