"""Products whose current price is drawn onto their image: merged changes, rendered by merchant grade."""
