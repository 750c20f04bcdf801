"""How the models that come with the package were made. Not part of the package."""
