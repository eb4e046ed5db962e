"""Who the ranks of a group are, how they meet, and what joins their nodes."""
