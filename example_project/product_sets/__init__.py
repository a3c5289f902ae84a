"""Product sets: Spark reads changes from files, evaluates rules, and writes which items belong to which set."""
