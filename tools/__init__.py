"""tools/ - scripts above the chapters, each for one question; `python -m tools` lists them."""
