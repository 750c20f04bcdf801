"""The draft model learns from the target. What people ask is kept where the user says so alone, on this device."""
