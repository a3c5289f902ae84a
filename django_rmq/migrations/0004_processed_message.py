from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):

    dependencies = [
        ('django_rmq', '0003_outbox'),
    ]

    operations = [
        migrations.CreateModel(
            name='ProcessedMessage',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('topic', models.CharField(max_length=100)),
                ('origin', models.UUIDField()),
                ('processed_at', models.DateTimeField(db_default=Now())),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('origin', 'topic'), name='rmq_processed_once')],
            },
        ),
    ]
