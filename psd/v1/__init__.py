"""The messages and stubs of proto/psd/v1, generated when the package is built."""
