"""The blocks of the pages about Keras and JAX run, as tests/docs has it of all other pages."""

from __future__ import annotations

import keras
import pytest
from block_runner import KERAS_PAGES, PageRunner
from source_tree import ROOT


@pytest.mark.parametrize("page", KERAS_PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path):
    before = keras.config.dtype_policy()
    try:
        with PageRunner(tmp_path) as runner:
            assert runner.run_page(ROOT / page) > 0
    finally:
        keras.config.set_dtype_policy(before)
