"""The messages and stubs of proto/psd/v1, generated when the package is built."""

import psd_core as psd_core  # which says what to do where nothing was built
