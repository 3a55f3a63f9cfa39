"""tools/ - programs above the scripts, each for one question; `python -m tools` lists them."""
