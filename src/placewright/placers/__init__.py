"""The methods that are not learned, one file each; `placewright.methods` lists them by name."""
