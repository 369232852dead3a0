"""Shapes and dtypes in the annotations of `lrlhf.functional` are checked while these tests run."""

from jaxtyping import install_import_hook

# has an effect on what is imported from here on: nothing above may import lrlhf
install_import_hook("lrlhf.functional", "beartype.beartype")
