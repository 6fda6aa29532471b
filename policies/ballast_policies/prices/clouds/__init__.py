"""What the price lists of clouds answer, and what it means for a GPU hour."""
