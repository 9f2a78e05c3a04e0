from lpom.tables.old.plan import ColumnPlan as ColumnPlan
from lpom.tables.old.plan import named as named
