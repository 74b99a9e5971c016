"""doubleback inside what people already train with: one short file each."""
