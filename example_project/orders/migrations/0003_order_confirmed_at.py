from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('orders', '0002_daily_report'),
    ]

    operations = [
        migrations.AddField(
            model_name='order',
            name='confirmed_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]
