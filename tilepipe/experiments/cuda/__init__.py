"""What the cuda executor's experiments have beside the host's: payload and oracle on the device."""
