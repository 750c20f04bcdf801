"""The draft model learns from corrections. They are collected where the user asks for it, and stay on this device."""
