"""What corrections teach the draft model: collected where the user asks for it, and kept on this device."""
