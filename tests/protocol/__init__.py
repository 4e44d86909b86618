"""The launch protocol as a model: programs of atomic steps, searched in every order."""
