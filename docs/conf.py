"""The site of docs/: `make docs` builds it into build/site. It loads nothing from elsewhere, so it can be read offline."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psd

sys.path.insert(0, str(Path(__file__).parent))  # for generated.py

# The reference is made without the frameworks: their environments differ, and importing them takes longer than all the rest.
# Sphinx's mocks would swallow the classes that Keras's decorator registers.
autodoc_mock_imports = ["torch", "jax", "accelerate", "lightning", "transformers"]
keras = ModuleType("keras")
keras.optimizers = SimpleNamespace(Optimizer=type("Optimizer", (), {}), LossScaleOptimizer=type("LossScaleOptimizer", (), {}))
keras.layers = SimpleNamespace(Layer=type("Layer", (), {}))
keras.saving = SimpleNamespace(register_keras_serializable=lambda **_: lambda kind: kind)
sys.modules["keras"] = keras

project = "psd"
html_title = "psd"
release = psd.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["psd.css"]
smartquotes_action = "D"  # dashes; quotes are code
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
add_module_names = False
