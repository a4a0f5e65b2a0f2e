"""Shared by all tests of this repository; the plugin itself comes with the package."""
