"""Who the peers are: ranks and the memory they store into."""
