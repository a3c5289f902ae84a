"""Product sets chosen by rules: changes from several sources, merged per item, evaluated by Spark one item at a time."""
