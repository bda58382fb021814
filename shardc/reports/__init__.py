"""What a compiled step does and costs, for people: `explain` predicts it, `report` reads it off."""
