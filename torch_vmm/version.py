"""The one version string; packaging and the extension take it from here."""

__version__ = "0.1.0"
