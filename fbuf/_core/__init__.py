"""Small tools that know nothing else of the package."""
