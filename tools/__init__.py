"""tools/ - programs that use the scripts, each for one question; `python -m tools` lists them."""
